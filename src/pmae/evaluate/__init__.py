"""What an encoder is worth: probes, neighbours, fine-tuning, baselines."""
