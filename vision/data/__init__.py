"""Images: readers, sources, augmentation."""
