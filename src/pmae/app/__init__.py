"""The explorer: a page on this machine to play with masks, walk the spectrum and find neighbours."""
