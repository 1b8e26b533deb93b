"""Models that learn which of several texts is the better one."""
