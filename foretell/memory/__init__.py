"""What caches are made of: buffers of rows, what changes or shares them, and jobs over them."""
