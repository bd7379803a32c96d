"""`make evaluate`: what is promised about answers, measured on a fresh run and held to its bounds."""
