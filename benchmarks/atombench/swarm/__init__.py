"""What averaging costs training, how newcomers join, and how relays carry."""
