"""Progress traces from seeds, healthy and hung, and a virtual clock that drives the real detector through them."""
