"""Readers of formats: arrays, CIFAR-10, Tiny ImageNet and folders of image files."""
