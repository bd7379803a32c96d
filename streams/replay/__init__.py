"""Dead letters back to the input topic: each once, whatever interrupts it."""
