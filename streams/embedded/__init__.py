"""Services that run out of a wheel, for the demo and the tests: nothing has to be installed beforehand."""
