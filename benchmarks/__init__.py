"""How fast a training step is: ours and the peers', how its cost grows, and where its time goes."""
