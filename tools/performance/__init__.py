"""Makes docs/performance.md and its pictures from what suites of `flashmoe bench` have measured."""
