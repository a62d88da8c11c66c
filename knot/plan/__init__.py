"""What a model would need before anything runs: topologies, memory, reads, speed and cost."""
