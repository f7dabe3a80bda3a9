"""What trains: configuration, estimators, rows, serving, engine, rollout and trainer. Knows verl."""
