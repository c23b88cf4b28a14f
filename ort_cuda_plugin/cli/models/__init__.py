"""Commands that report on a model without running it on a device, or compile it."""
