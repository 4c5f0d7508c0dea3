"""Show data, runs, plans and skew as tables on a console, and as HTML pages."""
