"""What the layers of each family compute: one description a layer, filled from a configuration."""
