"""What a training leaves behind for people to look at: its records, and the page made of them."""
