"""The rows of a step: in the queue, filtered, and what the loss multiplies them by."""
