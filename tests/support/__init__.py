"""What tests of several folders share and no product needs."""
