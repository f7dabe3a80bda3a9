"""From rewards to advantages: specifications, row ids and the kernel. No verl here."""
