"""Episodes on verl's servers: the agent-loop hook, the worker, the rows it writes."""
