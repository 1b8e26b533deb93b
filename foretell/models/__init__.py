"""What can stand behind the engine: one adapter a file."""
