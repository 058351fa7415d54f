"""From a table in a file to a traced network: reading, column types, encoding, training, saving.

What stands behind `whence table`. pandas is an extra and is imported where files are read and written.
"""
