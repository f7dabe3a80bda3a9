"""What changes in verl's engine: prefix trees, adapters, the scaled loss of float16."""
