/* Parses numbers of options and environment variables. */
#ifndef OCP_BASE_NUMBER_H
#define OCP_BASE_NUMBER_H

#include <stdbool.h>
#include <stdint.h>

/* A number of decimal digits, with K, M or G for 2^10, 2^20 or 2^30; false for other texts and for more than largest.
 */
bool ocp_parse_number(const char *text, uint64_t largest, uint64_t *value);

#endif
