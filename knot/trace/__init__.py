"""`knot trace`: what every isolate held while a prompt ran, drawn and checked."""
