"""What several environments are made of."""
