"""Everything that is only there for speed: attention, blocks, optimizer, masks and captured steps on a recent GPU."""
