"""From a checkpoint's files to a model on its device."""
