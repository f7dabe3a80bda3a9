"""From a candidate to vLLM's servers: requests, retries, replicas, weight sync."""
