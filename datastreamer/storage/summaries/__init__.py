"""What each page of a stream holds, and when its entries were committed: `FILE.pages`."""
