"""Experiments on tables: California housing and bank marketing."""
