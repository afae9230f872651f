"""Images: readers of formats, named sets, augmentation and batches."""
