/* Parses numbers and booleans of options and environment variables. */
#ifndef OCP_BASE_NUMBER_H
#define OCP_BASE_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

/* Parses decimal digits, optionally followed by K, M or G (2^10, 2^20, 2^30) in upper or lower case. Returns false for
 * any other text, and for a number above `largest`. */
bool ocp_parse_number(const char *text, uint64_t largest, uint64_t *value);

/* The values of a boolean, as error messages and the documentation name them. */
#define OCP_FLAG_TAKES "0 or 1"

/* Parses a boolean: 1, true, yes, on, or 0, false, no, off, in any case and with white space around it. Returns 1 for
 * true, 0 for false, or -1 for any other text. The plugin parses all its boolean options and environment variables by
 * this function, but not ONNX Runtime's own config entries, in which only "1" means true. */
int ocp_parse_flag(const char *text);

#endif
