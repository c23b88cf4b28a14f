/* Parses numbers of options and environment variables. */
#ifndef OCP_BASE_NUMBER_H
#define OCP_BASE_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

/* Parses decimal digits, optionally followed by K, M or G (2^10, 2^20, 2^30). False for any other text, and above
 * `largest`. */
bool ocp_parse_number(const char *text, uint64_t largest, uint64_t *value);

#endif
