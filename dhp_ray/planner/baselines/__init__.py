"""What `dhp` is compared with, each at its best pack cap."""
