"""Networks, loaders and options drawn at random; every public number of a fit is compared with dense algebra."""
