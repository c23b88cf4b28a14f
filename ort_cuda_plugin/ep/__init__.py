"""The control plane as ORT sees it: factory, provider, options, devices."""
