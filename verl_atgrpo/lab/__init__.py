"""What surrounds a training: evaluation, reports, tiny models, export."""
