"""`gradcomp plan`: what compression would gain for a model and a link, measured and modelled."""
