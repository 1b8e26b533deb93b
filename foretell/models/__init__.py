"""What is common to models; who may compute them."""
