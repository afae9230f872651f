"""The explorer: a page on this machine to play with masks, spectra and neighbours."""
