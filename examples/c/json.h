/* A reader of JSON (RFC 8259), for files of a known layout: what is not there or of another kind ends the program with a message. */
#ifndef JSON_H
#define JSON_H
#include <stddef.h>
#include <stdint.h>

typedef struct Json {
    enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } kind;
    char *key;           /* of a member of an object */
    char *text;          /* JSON_STRING */
    double number;       /* JSON_NUMBER; of JSON_BOOL 0 or 1 */
    struct Json *first;  /* item or member of JSON_ARRAY and JSON_OBJECT */
    struct Json *next;   /* after this one in what holds it */
} Json;

/* The value that a text holds; `name` of its file is for messages. The text is changed and must live as long as the value. */
Json *json_parse(char *text, const char *name);
/* The member of an object under a key; NULL where there is none, or no object. */
const Json *json_find(const Json *object, const char *key);
/* The same, of a given kind, or the end of the program. */
const Json *json_member(const Json *object, const char *key, int kind);
#endif
