"""Records of a training, and the HTML report made from them."""
