"""What papers have and production rarely needs: drafters, targets, verification methods, searches.

The lab imports the core, never the reverse; `entry_points.txt` says what it brings, as an installed
package would. Its commands, tests and documents are promised like the core's.
"""
