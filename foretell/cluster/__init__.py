"""Beyond one machine: what a plan costs, and several workers on one cluster."""
