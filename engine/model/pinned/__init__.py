"""option.batch_invariant on GPUs: layers that give a token the same bits, whatever the batch is."""
