"""Golden queries: asked, judged, measured, and reported on."""
