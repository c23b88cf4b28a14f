"""Token search and n-grams of com.microsoft."""
