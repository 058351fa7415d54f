"""From a table in a file to a traced network: reading, column types, encoding, training, saving.

This is the code behind `whence table`. pandas is an extra, imported only where files are read and written.
"""
