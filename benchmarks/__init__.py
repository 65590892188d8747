"""Every figure that we promise, measured side by side with plain torch: `make bench`."""
