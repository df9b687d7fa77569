"""Methods of papers that production rarely needs: drafters, targets, verification methods,
searches.

The lab imports the core, never the reverse. `entry_points.txt` lists its entries, as in an
installed package. Its commands, tests and documents have the same guarantees as the core's.
"""
