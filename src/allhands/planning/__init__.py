"""What a training would take on any number of GPUs: memory, bytes and time, before it is run."""
