"""The wire between ranks that are threads of one process, whose messages meet in a `room`."""
