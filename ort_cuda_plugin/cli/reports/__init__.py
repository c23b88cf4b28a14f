"""Commands about the plugin itself: the installation, operators, options, conformance."""
